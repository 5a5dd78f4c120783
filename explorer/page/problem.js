// The page that says why a text was not run: in the language and the theme that the reader chose on the page before.

const STRINGS = JSON.parse(document.getElementById('strings').textContent);
const field = document.querySelector('[name=language]');
const button = document.getElementById('language');

function recall(key) {
  try {
    return localStorage.getItem(`tercet-${key}`);
  } catch {
    return null; // a browser that keeps nothing still shows the page
  }
}

function show(language) {
  document.documentElement.lang = language === 'zh' ? 'zh-CN' : 'en';
  document.title = STRINGS[language].title;
  field.value = language;
  for (const node of document.querySelectorAll('[data-text]')) node.textContent = STRINGS[language][node.dataset.text];
  button.textContent = STRINGS[language].other_language;
  button.lang = language === 'zh' ? 'en' : 'zh-CN';
}

button.hidden = false;
button.addEventListener('click', () => {
  const language = field.value === 'zh' ? 'en' : 'zh';
  try {
    localStorage.setItem('tercet-language', language);
  } catch {
    // then it holds for this page alone
  }
  show(language);
});
document.querySelector('form').addEventListener('submit', () => {
  const run = document.querySelector('[data-text=run]');
  run.textContent = STRINGS[field.value].running;
  run.disabled = true;
});
const theme = recall('theme');
if (theme === 'light' || theme === 'dark') {
  document.documentElement.dataset.theme = theme;
  document.getElementById('dark').media = theme === 'dark' ? 'all' : 'not all';
}
show(STRINGS[recall('language')] ? recall('language') : field.value);
